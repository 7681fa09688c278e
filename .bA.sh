cd /tmp/wt/pick; export PYTHONPATH=/tmp/wt/pick; P=/work/main/.venv/bin/python
{ date; timeout 60 $P .micro.py
timeout 240 $P -m pytest -q -n 0 -x tests/distributed/shared_memory/test_shared_ring.py tests/distributed/shared_memory/test_transport.py tests/cpu/test_partition.py 2>&1 | tail -15
date; timeout 300 $P .phases.py --ranks 2,4,8 --rounds 2 --megabytes 128
date; } > .bundle.log 2>&1
