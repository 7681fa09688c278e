export PYTHONPATH=/tmp/wt/pick XDG_CACHE_HOME=/tmp/wt/pick/.tut/cache NO_COLOR=1
P=/work/main/.venv/bin/python
set -x
time $P train.py
time $P -m nano_loop tune --num-processes auto --split-batches train.py
time $P train.py
$P -m nano_loop doctor
time $P -m nano_loop run --num-processes 2 --split-batches train.py
