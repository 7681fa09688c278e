exec(open('triage.py').read().split("if __name__")[0])
import time
ROWS['nothing']=ROWS['lr']._replace(change=lambda p: None)
for c in (pairs.SHIPPED,pairs.PRODUCTS,pairs.SHIPPED_NHWC):
    for n in ('nothing','eps of layer norms','lr','forward of torchs classes','autocast by the program','every function of torch noted'):
        t0=time.time(); r=run(n,c); print(c.name,n,'->',r[:250],round(time.time()-t0,1),flush=True)
