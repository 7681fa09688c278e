"""Language models of transformers with PEFT adapters: what PEFT does to frozen weights applies in the next call."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

import nano_loop
from nano_loop.config.declarations import EXACT
from nano_loop.precision.autocast import frozen_weights

WIDTH = 64


def model_of(kind="default"):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=128,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    model = get_peft_model(Qwen2ForCausalLM(config), adapters)
    if kind == "two adapters":
        model.add_adapter("other", adapters)
    if kind == "checkpointing":
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def nothing(model, folder):
    yield


def merged_and_unmerged(model, folder):
    model.merge_adapter()
    yield
    model.unmerge_adapter()


def merged_safely(model, folder):
    model.merge_adapter(safe_merge=True)
    yield


def disabled(model, folder):
    with model.disable_adapter():
        yield


def switched(model, folder):
    model.set_adapter("other")
    yield
    model.set_adapter("default")


def saved_and_loaded(model, folder):
    model.save_pretrained(folder)
    saved = load_file(folder / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    yield
    model.load_adapter(folder, "loaded")
    model.set_adapter("loaded")


def merged_for_good(model, folder):
    merged = copy.deepcopy(model).merge_and_unload()
    assert {tensor.dtype for tensor in merged.state_dict().values()} == {torch.float32}
    yield


def trained(kind, change, folder, by_hand, frozen):
    """Return the results of three parts of a training, between which the adapters change."""
    model, seen = model_of(kind), []
    if by_hand and frozen == "bf16":
        for parameter in model.parameters():
            if not parameter.requires_grad and parameter.dim() > 1:
                parameter.data = parameter.data.bfloat16().float()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    tokens = torch.randint(128, (4, 2, 16), generator=torch.Generator().manual_seed(1))

    def steps():
        for batch in tokens:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=by_hand):
                loss = model(input_ids=batch, labels=batch).loss
            if loss.requires_grad:
                loss.backward()
                optimizer.step()
            seen.append(loss.item())

    def loop(model, optimizer):
        torch.manual_seed(2)
        steps()
        changing = change(model, folder)
        next(changing)
        steps()
        next(changing, None)
        steps()
        seen.append([p.detach().clone() for p in model.parameters()])

    if by_hand:
        loop(model, optimizer)
        return seen, None
    train = nano_loop.nano(**EXACT | {"precision": "bf16", "frozen_dtype": frozen}, verbose=False)(loop)
    train(model, optimizer)
    return seen, train.report


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *(
            ("default", change)
            for change in (nothing, merged_and_unmerged, merged_safely, disabled, saved_and_loaded, merged_for_good)
        ),
        ("two adapters", switched),
        ("checkpointing", merged_and_unmerged),
    ],
)
@pytest.mark.parametrize("frozen", ["32", "bf16"])
def test_training_with_adapters_is_that_by_hand(kind, change, frozen, tmp_path, monkeypatch):
    monkeypatch.setattr(frozen_weights, "FEWEST", 1)
    expected, _ = trained(kind, change, tmp_path / "by_hand", True, frozen)
    actual, report = trained(kind, change, tmp_path / "ours", False, frozen)
    assert actual[:-1] == expected[:-1]
    assert all(map(torch.equal, actual[-1], expected[-1]))
    if frozen == "bf16":
        assert "freed" in report["frozen_dtype"].detail
    else:
        assert "frozen weights of PeftModel rounded once" in report["precision"].detail


def test_weights_in_memory_of_a_file_have_no_copies(tmp_path, monkeypatch):
    monkeypatch.setattr(frozen_weights, "FEWEST", 1)
    model_of().unload().save_pretrained(tmp_path)
    model = Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).requires_grad_(False)
    report = nano_loop.nano(precision="bf16", verbose=False)(lambda model: model(torch.ones(1, 4, dtype=torch.int64)))
    report(model)
    assert "rounded once" not in report.report["precision"].detail
    report = nano_loop.nano(frozen_dtype="bf16", verbose=False)(lambda model: model.lm_head.weight.numbers.narrow.dtype)
    assert report(model) is torch.bfloat16
