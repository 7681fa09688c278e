cd /tmp/wt/pick; export PYTHONPATH=/tmp/wt/pick; P=/work/main/.venv/bin/python
item() { mkdir .q/$1 2>/dev/null || return 0; n=$1; shift; { date; "$@"; echo "rc $?"; date; } > .q/$n.log 2>&1; }
item 1ring timeout 300 $P -m pytest -q -n 0 tests/distributed/shared_memory/test_shared_ring.py tests/distributed/shared_memory/test_transport.py tests/cpu/test_partition.py
item 2unit timeout 300 $P -m pytest -q -n 0 tests/config/test_options.py tests/runtime/test_learnt_options.py tests/cli/tuning tests/cli/test_doctor.py tests/test_architecture.py tests/runtime/test_ambient.py tests/integrations/lightning/test_trainer.py
item 3lint bash -c "/work/main/.venv/bin/ruff check .; /work/main/.venv/bin/ruff format --check .; timeout 250 $P -m mypy --strict nano_loop; PYTHONPATH=tests:/tmp/wt/pick $P -m test_readme"
item 4tut timeout 700 bash -c "cd .tut && bash run.sh"
item 5avg timeout 300 $P .phases.py --ranks 2,4,8 --rounds 2 --megabytes 128
item 6bench timeout 400 $P -m pytest -q -n 0 tests/benchmarks/test_programs.py -k "scaling or averaging"
item 7docs timeout 300 $P -m pytest -q -n 0 tests/test_glossary.py tests/test_docstrings.py tests/test_documentation_links.py tests/test_site.py tests/test_readme.py tests/test_planted_faults.py
