"""Models of Hugging Face's transformers use nano_loop's attention, and learn as under autocast."""

import contextlib
import copy
from importlib.util import find_spec

import pytest
import torch

from nano_loop import nano
from nano_loop.kernels.attention import attention, blocked_attention

if find_spec("transformers"):
    import transformers

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="it is in the environment of test-ipex")
STEPS, LAYERS = 4, 2
SIZE = {"hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.fixture
def answered(monkeypatch):
    """Record for each call of attention whether the kernel in C supports it, at any number of scores."""
    found, supports = [], blocked_attention.supports
    monkeypatch.setattr(attention, "MIN_SCORES", 1)
    monkeypatch.setattr(blocked_attention, "supports", lambda *given: found.append(supports(*given)) or found[-1])
    return found


def tokens():
    return torch.randint(100, (4, 24), generator=torch.Generator().manual_seed(0))


def padded_bert():
    config = transformers.BertConfig(vocab_size=100, intermediate_size=128, **SIZE, **NO_DROPOUT)
    mask = torch.ones(4, 24, dtype=torch.long)
    mask[1, 16:] = mask[3, 5:] = 0
    return transformers.BertForMaskedLM(config), {"input_ids": tokens(), "labels": tokens(), "attention_mask": mask}


def gpt2():
    sizes = {"n_embd": 64, "n_layer": LAYERS, "n_head": 2, "n_positions": 24, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=100, **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens(), "labels": tokens()}


def grouped_llama():
    config = transformers.LlamaConfig(vocab_size=100, intermediate_size=128, num_key_value_heads=1, **SIZE)
    return transformers.LlamaForCausalLM(config), {"input_ids": tokens(), "labels": tokens()}


def vit():
    config = transformers.ViTConfig(intermediate_size=128, image_size=32, patch_size=8, **SIZE, **NO_DROPOUT)
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return transformers.ViTForImageClassification(config), {
        "pixel_values": images,
        "labels": torch.tensor([0, 1, 0, 1]),
    }


def train(model, optimizer, batch, bf16=False):
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext():
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.mark.parametrize("built", [padded_bert, gpt2, grouped_llama, vit])
def test_attention_goes_through_nano_loops_and_the_model_learns_the_same(built, answered):
    torch.manual_seed(0)
    model, batch = built()
    by_hand = copy.deepcopy(model).train()
    accelerated = nano(precision="bf16", auto_lr=False, verbose=False)(train)
    losses = accelerated(model.train(), adamw(model), batch)
    if blocked_attention.KERNEL.unavailable is None:
        assert accelerated.report["fast_attention"].status == "applied"
        assert answered == [True] * (LAYERS * STEPS)
    else:
        assert accelerated.report["fast_attention"].code == "no_kernel"
    assert losses == pytest.approx(train(by_hand, adamw(by_hand), batch, bf16=True), rel=1e-2)
    assert losses[-1] < 0.99 * losses[0]
