exec(open('triage.py').read().split("if __name__")[0])
import sys
for n in open('f7.txt').read().split('\n')[:-1]:
    for o in eval(sys.argv[1]):
        print(n,o,run(n,replace(pairs.NHWC_FUSED,options={**pairs.NHWC_FUSED.options,**o}))[:700],flush=True)
