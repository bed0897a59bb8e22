from test_tmp_lm import *
@pytest.mark.parametrize("r",[{}, {"batch.micro_size":2}, {"optimizer.clip_norm":0.5}, {"optimizer.name":"adamw","optimizer.learning_rate":0.01}])
def test_t(gloo, r):
    wl=Lm(tie_head=False)
    fin = gloo.run(4, train, wl, {**r, "strategy.name":"tensor", "tensor.sequence_parallel": False, "stop.after":"2 steps"})[0]
    plain = train_in_plain_torch(wl, {**r, "stop.after": "2 steps"})
    print(r, list(relative_differences(plain.losses, fin.losses)), list(relative_differences(plain.grad_norms, fin.grad_norms)))
    for n in plain.weights: 
        d=largest_difference({n:plain.weights[n]},{n:fin.weights[n]})
        if d>1e-9: print(n,d)
