import sys; sys.path.insert(0,'tests')
import torch, pytest, warnings
warnings.simplefilter('error'); warnings.filterwarnings('ignore', '.*this CPU has no')
from dataclasses import replace
from loops import test_changes as tc, pairs
from loops.changes import ROWS, built, changed_by
from nano_loop.autotune import budget
from nano_loop.steps import tune_operators
from nano_loop.autotune.choices import Choices
budget.STEPS=-1; budget.SHARE=-1; tune_operators.choices_for=lambda m: Choices(None)
mp=pytest.MonkeyPatch()
tc.every_kernel_computes.__wrapped__(mp) if hasattr(tc.every_kernel_computes,'__wrapped__') else tc.every_kernel_computes._fixture_function(mp)
def run(name, config=pairs.FUSED):
    torch.manual_seed(0)
    try:
        tc.ROWS is ROWS and tc.check_row(name, config)
    except AssertionError as e:
        lines=str(e).split('\n')
        return f"{len(lines)} lines: "+' | '.join(l[:230] for l in lines[:3])
    except BaseException as e:
        return f"RAISED {type(e).__name__}: {str(e)[:300]}"
    return 'ok'
if __name__=='__main__':
    import pathlib; names=[n for n in pathlib.Path(sys.argv[1]).read_text().split('\n') if n in ROWS]
    opts=[eval(o) for o in sys.argv[2:]] or [{}]
    for n in names:
        for o in opts:
            print(n,'#',o,'->',run(n,replace(pairs.FUSED,options=o)),flush=True)
