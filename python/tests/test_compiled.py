"""What is compiled, and calls optimizer.step() or is called by it: bits are to be those of parts that others apply."""

import pytest

torch = pytest.importorskip("torch")

from test_session import Job, session  # noqa: E402


def updates_of(one, native, cuts=()):
    """Give the step's updates, of tensors that are cut there."""
    native.broken, updates = False, []
    for number, tensor in enumerate(one._tensors):
        tensor.reduced.copy_(tensor.gradient)
        borders = [0, *cuts, tensor.count]
        for first, end in zip(borders[:-1], borders[1:], strict=True):
            address = tensor.reduced.data_ptr() + first * tensor.reduced.element_size()
            updates.append((number, first, end - first, native.step, address))
    return updates


@pytest.mark.parametrize("compiles", ["a step", "the loop"])
@pytest.mark.parametrize("in_parts", [False, True])
def test_updates_run_uncompiled_within_a_compiled_function(tmp_path, monkeypatch, compiles, in_parts):
    model, compiled = torch.nn.Linear(4, 3), []

    def backend(graph, inputs):
        compiled.extend(str(node.target) for node in graph.graph.nodes if node.op.startswith("call"))
        return graph.forward

    one, native = session(tmp_path), Job(3)
    one.attach(model, torch.optim.AdamW(model.parameters(), lr=0.1), max_norm=0.5, ema=0.9)

    native.begin_update = lambda: updates_of(one, native, [1] if in_parts else [])
    for of in (one, one._buckets, one._updates):
        monkeypatch.setattr(of, "_native", native)
    monkeypatch.setattr(one, "_joined", True)
    before, x = model.weight.detach().clone(), torch.randn(5, 4)

    def train(x):
        model(x).square().mean().backward()
        one._optimizer.step()
        one._optimizer.zero_grad()

    def loop():
        for _ in one.steps():
            train(x)

    if compiles == "a step":
        train = torch.compile(train, backend=backend)
        loop()
    else:
        torch.compile(loop, backend=backend)()
    assert one.finished and not torch.equal(model.weight, before)
    assert any("linear" in name for name in compiled), "nothing was compiled"
    others = [name for name in compiled if not any(of in name for of in ("linear", "square", "mean", "backward"))]
    assert not others, "what is the session's was compiled, too"


@pytest.mark.parametrize("cuts", [(), (64, 128)])
@pytest.mark.parametrize("settings", [{}, {"fullgraph": True}, {"dynamic": False}])
def test_what_an_optimizer_has_compiled_runs_as_it_is_written_for_whole_tensors_and_parts(
    tmp_path, monkeypatch, settings, cuts
):
    """Else trials and parts use up torch's limit of recompilations, and whoever has caught up has other bits."""
    torch.compiler.reset()
    compiled, called = [], []

    def backend(graph, inputs):
        compiled.append(len(inputs))
        return graph.forward

    @torch.compile(backend=backend, **settings)
    def updated(p, gradient, momentum, rate):
        p.sub_(momentum.mul_(0.9).add_(gradient), alpha=rate)

    class Compiling(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    called.append(p.numel())
                    updated(p, p.grad, momentum, group["lr"])

    sizes = [(64, 15 + i) for i in range(10)]  # more than the limit
    model, one, native = torch.nn.ModuleList(torch.nn.Linear(*of) for of in sizes), session(tmp_path), Job(2)
    for linear in model:
        linear.bias = None
    optimizer = Compiling(model.parameters(), {"lr": 0.1})
    one.attach(model, optimizer)
    assert called and not compiled and all(tensor.elementwise for tensor in one._tensors)
    native.begin_update = lambda: updates_of(one, native, cuts)
    for of in (one, one._buckets, one._updates):
        monkeypatch.setattr(of, "_native", native)
    monkeypatch.setattr(one, "_joined", True)
    for _ in one.steps():
        called.clear()
        sum(linear(torch.ones(1, 64)).sum() for linear in model).backward()
        optimizer.step()
        assert len(called) == len(sizes) * (len(cuts) + 1)
    assert one.finished and not compiled
    updated(torch.ones(3), torch.ones(3), torch.zeros(3), 0.1)
    assert compiled, "the script's own goes on compiling"
