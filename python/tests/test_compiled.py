"""A compiled function that calls optimizer.step(), whose bits are to be those of the parts that others apply."""

import pytest

torch = pytest.importorskip("torch")

from test_session import Job, session  # noqa: E402


@pytest.mark.parametrize("compiles", ["a step", "the loop"])
@pytest.mark.parametrize("in_parts", [False, True])
def test_updates_run_uncompiled_within_a_compiled_function(tmp_path, monkeypatch, compiles, in_parts):
    model, compiled = torch.nn.Linear(4, 3), []

    def backend(graph, inputs):
        compiled.extend(str(node.target) for node in graph.graph.nodes if node.op.startswith("call"))
        return graph.forward

    one, native = session(tmp_path), Job(3)
    one.attach(model, torch.optim.AdamW(model.parameters(), lr=0.1), max_norm=0.5, ema=0.9)

    def begin_update():
        native.broken, updates = False, []
        for number, tensor in enumerate(one._tensors):
            tensor.reduced.copy_(tensor.gradient)
            cuts = [0, 1, tensor.count] if in_parts else [0, tensor.count]
            for first, end in zip(cuts[:-1], cuts[1:], strict=True):
                address = tensor.reduced.data_ptr() + first * tensor.reduced.element_size()
                updates.append((number, first, end - first, native.step, address))
        return updates

    native.begin_update = begin_update
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
