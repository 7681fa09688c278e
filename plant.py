import sys, subprocess, shutil, os, pathlib, re
F=[
('data/indexed_attributes.py','def indexed_sample(','@__import__("functools").cache\ndef indexed_sample(','dataset'),
('kernels/rnn/rnn.py','torch.dropout(outputs, call.dropout, True)','torch.dropout(outputs, 0.1, True)','GRU'),
('kernels/norm/norms.py','weight, bias, float(eps), out, means, inverses)','weight, bias, 1e-5, out, means, inverses)','eps'),
('kernels/norm/rms_norm.py','weight, float(eps))','weight, 1e-5)','RMS'),
('kernels/activation/activations.py','kwargs.get("approximate", "none")','"none"','approximate'),
('kernels/loss/cross_entropy.py','if weight is not None or not 0','if not 0','loss'),
('optimizers/direct_steps.py','"eps": group["eps"],','"eps": 1e-2,','eps'),
('optimizers/direct_steps.py','        "beta1": beta1,\n','        "beta1": 0.9,\n','betas'),
('optimizers/direct_steps.py','("lr", "lr_decay", "weight_decay", "eps", "maximize")}','("lr", "lr_decay", "weight_decay", "eps", "maximize")} | {"lr_decay": 0.0}','decay'),
('kernels/embedding/lookup.py','torch.ops.aten.embedding(weight, indices)','weight.index_select(0, indices.reshape(-1)).view(*indices.shape, -1)','place'),
('kernels/embedding/lookup.py','indices.to(torch.int64), None, ctx.padding))','indices.to(torch.int64), None, -1))','padding'),
('kernels/embedding/row_gradient.py','            and gradient.layout is torch.strided\n','','sparse'),
('kernels/dropout/bernoulli.py','math.ceil(math.ldexp(p, 53))','math.ceil(math.ldexp(0.9, 53))','dropout or p_of'),
('steps/fast_fetch.py','if loader.collate_fn is not default_collate:','if False:','collate'),
('kernels/embedding/lookup.py','indices.to(torch.int64), None','indices, None','words or dtype'),
]
if __name__=='__main__':
    here=pathlib.Path('/tmp/wt/changes'); other=pathlib.Path('/tmp/wt/changes_p')
    sel=[f for f in F if len(sys.argv)<2 or any(a in f[0] for a in sys.argv[1:])]
    for file,text,planted,k in sel:
        if other.exists(): shutil.rmtree(other)
        other.mkdir()
        for n in ('nano_loop','tests'): shutil.copytree(here/n,other/n)
        shutil.copy(here/'setup.cfg',other/'setup.cfg')
        p=other/'nano_loop'/file; s=p.read_text()
        if s.count(text)!=1: print(file,repr(text),'COUNT',s.count(text)); continue
        p.write_text(s.replace(text,planted))
        r=subprocess.run(['/tmp/slot',sys.executable,'-m','pytest','-n','0','-q','-p','no:cacheprovider','--tb=line','-m','not slow','tests/loops/test_changes.py','-k',f'holds_from and ({k})'],cwd=other,env={**os.environ,'PYTHONPATH':str(other)},capture_output=True,text=True)
        failed=re.findall(r'FAILED .*?\[(.*?)\]',r.stdout); print(file,repr(planted)[:50],'->',failed,r.stdout.strip().split('\n')[-1],flush=True)
    shutil.rmtree(other)
