exec(open('triage.py').read().split("if __name__")[0])
ROWS['nothing']=ROWS['lr']._replace(change=lambda p: None)
from nano_loop.config.declarations import EXACT as VALUES
print(VALUES)
import time
from nano_loop.steps.kernels import KERNEL_STEPS
alone=[pairs.Config(k.name,{**{n:v for n,v in VALUES.items() if n!='channels_last'},k.name:True},tolerance=1e-5,subclass=True) for k in KERNEL_STEPS if k.takes_fp32]
for c in (pairs.EXACT,pairs.SHIPPED,pairs.PRODUCTS,pairs.NHWC,pairs.NHWC_FUSED,pairs.SHIPPED_NHWC,pairs.PRODUCTS_NHWC,pairs.BF16,pairs.FP64,*alone):
    t0=time.time(); r=run('nothing',c); print(c.name,'->',r[:500],time.time()-t0,flush=True)
