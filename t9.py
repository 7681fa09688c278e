exec(open('triage.py').read().split("if __name__")[0])
import sys, collections
n='every function of torch noted'
P=__import__('loops.changes.program',fromlist=['x'])
for cfg in (pairs.FUSED,pairs.NHWC_FUSED,pairs.SHIPPED):

    loop=changed_by(ROWS[n].change)
    torch.manual_seed(0)
    a,_=pairs.run_accelerated(built,loop,cfg); p=pairs.run_plain(built,loop)
    la=[e for e in a['seen']['result'] if isinstance(e,list) and e and isinstance(e[0],str)][0]
    lp=[e for e in p['seen']['result'] if isinstance(e,list) and e and isinstance(e[0],str)][0]
    ca,cp=collections.Counter(la),collections.Counter(lp)
    print(cfg.name,len(la),len(lp),{k:(ca[k],cp[k]) for k in ca|cp if ca[k]!=cp[k]})
