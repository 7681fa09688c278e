cd /tmp/wt/pick; export PYTHONPATH=/tmp/wt/pick; P=/work/main/.venv/bin/python
{ date; timeout 200 $P -m mypy --strict nano_loop; /work/main/.venv/bin/ruff check .; /work/main/.venv/bin/ruff format --check .;
 timeout 300 $P -m pytest -q -n 0 tests/config/test_options.py tests/integrations/lightning/test_trainer.py tests/runtime/test_ambient.py tests/runtime/test_learnt_options.py tests/cli/tuning tests/cli/test_doctor.py tests/test_architecture.py 2>&1 | tail -15; PYTHONPATH=tests:/tmp/wt/pick $P -m test_readme; date; } > .c.log 2>&1
