"""Architectures of transformers at a small size: configurations are shrunk by the names of their fields."""

import contextlib
import dataclasses
import importlib
import inspect
import itertools
import re

import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from proof.program import Program, loss_of, seed

_MOST_PARAMETERS = 10_000_000
_MOST_ATTEMPTS = 20
_VOCABULARY = 128

#: Maximum values of matching fields; the first matching rule applies. A list keeps its length.
_SIZES = (
    (r"\w*vocab_size\w*|codebook_size|n_vocab|vocab", _VOCABULARY),
    (r"\w*(num_key_value_heads|n_head_kv|num_kv_heads|linear_num_key_heads)", 2),
    (r"\w*(attention_heads|num_heads|n_heads?|value_heads|head_groups)", 4),
    (r"depths|num_block_repeats|layers", 1),
    (r"\w*(head_dim|d_kv|rotary_dim|head_size)", 8),
    (r"\w*(hidden_size|d_model|n_embd|embed_dim|embedding_size|projection_dim|hidden_dim|emb_dim|output_size)", 32),
    (r"dim|model_dim|output_dim|\w*(embedding_dim|encoder_dim|text_dim|query_dim|hidden_channels|width)|conv_dim", 32),
    (r"\w*(lora_rank|latent_dim|bottleneck_size)", 16),
    (r"\w*(intermediate_size|ffn_dim|d_ff|n_inner|mlp_dim|mlp_hidden_dim|ffn_hidden_size|dim_feedforward)", 64),
    (r"\w*(position_embeddings|n_positions|n_ctx|source_positions|target_positions)", 512),
    (r"\w*(num_experts|num_local_experts|n_routed_experts)", 4),
    (r"\w*(experts_per_tok|top_?k|n_group|topk_group|first_k_dense_replace)", 1),
    (r"\w*(num_queries|query_tokens|num_latents)", 10),
    (r"image_size|input_size", 64),
    (r"(mamba_)?chunk_size", 8),
)
_LAYERS = (r"\w*(num_hidden_layers|num_layers|n_layers?|encoder_layers|decoder_layers|num_blocks|depth|layer_num)", 2)
#: Fields that are None by default, but that some models require.
_FILLED = re.compile("num_experts_per_tok|topk_group|n_group|moe_topk|head_dim")
#: Names of configurations.
KINDS = sorted(CONFIG_MAPPING)
#: Sets of rules; if a configuration is rejected, or no input is accepted, the next set is tried.
_SETS = (
    (_LAYERS, *_SIZES),
    _SIZES,
    (_LAYERS, *((rule, {32: 64, 8: 16}.get(value, value)) for rule, value in _SIZES)),
    # Rotary sections given as integers require their own head size.
    (_LAYERS, *((rule, {32: 256, 4: 2}.get(value, value)) for rule, value in _SIZES if value != 8)),
    (_LAYERS, _SIZES[0], _SIZES[3], *_SIZES[8:]),
)


def _shrunk(name, default, sizes):
    """Return the new value of a field."""
    if isinstance(default, dict) and "mrope_section" in default:
        return {**default, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
    for rule, size in sizes:
        if re.fullmatch(rule, name):
            if type(default) is int and default > size:
                return size
            if isinstance(default, (list, tuple)) and default and all(type(each) is int for each in default):
                return type(default)(min(each, 2 if size == 4 else size) for each in default)
    if re.search(r"_token_id$|_token_index$", name) and type(default) is int and default >= _VOCABULARY:
        return 3 + sum(map(ord, name)) % (_VOCABULARY - 9)
    return default


def _configuration(cls, sizes, given=None):
    """Return a small configuration of a class; it derives fields that depend on others itself."""
    settings = dict(given or {})
    for field in dataclasses.fields(cls):
        default = settings.get(field.name, field.default)
        if default is None and _FILLED.fullmatch(field.name):
            settings[field.name] = 8 if field.name == "head_dim" else 1
        elif default is not dataclasses.MISSING and default is not None:
            small = _shrunk(field.name, default, sizes)
            if small is not default or field.name in settings:
                settings[field.name] = small
    for name, spec in cls.sub_configs_defaults.items():
        inner = CONFIG_MAPPING[spec.model_type] if spec.config_class is AutoConfig else spec.config_class
        settings[name] = _configuration(inner, sizes, spec.init_kwargs)
    return cls(**settings)


def _classes(kind):
    """Return the model classes of a kind of configuration, those without a head first."""
    cls, found = CONFIG_MAPPING[kind], []
    with contextlib.suppress(KeyError, ValueError):  # it has none, or a name that its module lacks
        found.append(MODEL_MAPPING[cls])
    with contextlib.suppress(Exception):
        module = importlib.import_module(cls.__module__.replace("configuration_", "modeling_"))
        inside = [each for each in vars(module).values() if getattr(each, "config_class", None) is cls]
        found += sorted(inside, key=lambda each: not each.__name__.endswith("Model"))
    classes = [each for each in dict.fromkeys(found) if isinstance(each, type) and issubclass(each, PreTrainedModel)]
    return [each for each in classes if not each.__name__.endswith("PreTrainedModel")][:3]


def _inputs(model, config):
    """Yield model arguments by name: its main input, with or without token ids and a decoder's token ids."""
    names, text = inspect.signature(model.forward).parameters, config.get_text_config()
    words = torch.randint(3, max(4, min(getattr(text, "vocab_size", None) or _VOCABULARY, _VOCABULARY)), (2, 12))
    images = [torch.randn(2, 3, 64, 64), torch.randn(2, 4, 3, 32, 32)]
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        size, channels = getattr(part, "image_size", None), getattr(part, "num_channels", None) or 3
        if isinstance(size, (int, tuple, list)) and isinstance(channels, int):
            images.insert(0, torch.randn(2, channels, *((size, size) if isinstance(size, int) else size[-2:])))
    bins = getattr(config, "num_mel_bins", None) or getattr(config, "feature_size", None) or 80
    features = [torch.randn(2, bins, 64), torch.randn(2, 64, bins), torch.randn(2, bins, 3000)]
    states = [torch.randn(2, 12, getattr(text, "hidden_size", 32))]
    series = getattr(config, "context_length", None) or 32, getattr(config, "num_input_channels", 1)
    decoder = {"decoder_input_ids": words} if "decoder_input_ids" in names else {}
    for name, values in {
        "input_ids": [words],
        "pixel_values": images,
        "input_values": [torch.randn(2, 4000), torch.randn(2, 1, 4000), *features],
        "input_features": features,
        "past_values": [torch.randn(2, *series)],
        "inputs_embeds": states,
        "hidden_states": states,
    }.items():
        for value in values if name in names else ():
            yield {name: value, **decoder}
            if name != "input_ids" and "input_ids" in names:
                yield {name: value, "input_ids": words, **decoder}


def _attempts(kind):
    """Yield small models of a kind with possible arguments. Rejected attempts are skipped."""
    for sizes, cls in itertools.product(_SETS, _classes(kind)):
        with contextlib.suppress(Exception):
            config = _configuration(CONFIG_MAPPING[kind], sizes)
            with torch.device("meta"):
                size = sum(each.numel() for each in cls(config).parameters())
            if size <= _MOST_PARAMETERS:
                seed(0)
                model = cls(_configuration(CONFIG_MAPPING[kind], sizes)).float().train()
                yield from ((model, named) for named in _inputs(model, config))


def build(kind):
    """Return the program of the first small model of a kind that trains, or None."""
    for model, named in itertools.islice(_attempts(kind), _MOST_ATTEMPTS):
        with contextlib.suppress(Exception):
            program = Program(model, (), named)
            tried = program.copy()  # a model may keep intermediate results
            loss = loss_of(tried.model(**tried.inputs[1]))
            if loss is not None and loss.isfinite():
                loss.backward()
                return program
    return None
