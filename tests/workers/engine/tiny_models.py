"""Tiny models of many families, with random weights."""

from pathlib import Path
from typing import Any

VOCABULARY_SIZE = 257
SIZES = {"vocab_size": VOCABULARY_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 256}
IDS = {"eos_token_id": 256, "bos_token_id": None, "pad_token_id": None, "initializer_range": 0.3}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen2": GROUPED | {"use_sliding_window": False},
    "qwen3": GROUPED | {"head_dim": 16},
    "mistral": GROUPED | {"sliding_window": 11},
    "gemma2": GROUPED | {"head_dim": 8, "sliding_window": 9, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 3.0},
    "gemma3_text": GROUPED | {"head_dim": 8, "sliding_window": 9, "query_pre_attn_scalar": 8},
    "phi3": GROUPED | {"pad_token_id": 0},
    "gpt_neox": SIZES | {"intermediate_size": 48, "max_position_embeddings": 256},
    "gpt2": {"vocab_size": VOCABULARY_SIZE, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "stablelm": GROUPED,
    "gpt_oss": GROUPED
    | {"head_dim": 8, "sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": None},
    "mixtral": GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": GROUPED | {"head_dim": 16, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": GROUPED  # keys of 16 numbers and values of 12
    | {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    | {"v_head_dim": 12, "first_k_dense_replace": 1, "moe_intermediate_size": 24, "n_routed_experts": 4}
    | {"n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    "gemma": GROUPED | {"head_dim": 8},
    "phi": GROUPED,
    "olmo2": GROUPED,
    "granite": GROUPED | {"embedding_multiplier": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3},
    "cohere": GROUPED,
    "cohere2": GROUPED | {"head_dim": 8, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    "starcoder2": GROUPED | {"sliding_window": 10},
    "opt": SIZES | {"ffn_dim": 48, "max_position_embeddings": 256, "word_embed_proj_dim": 32},
    "nemotron": GROUPED | {"head_dim": 8},
    "smollm3": GROUPED | {"no_rope_layers": [1, 0]},
    "glm4": GROUPED | {"head_dim": 8},
}


def save_tiny_model(family: str, directory: Path, **changes: Any) -> Path:
    """A model with random weights and a byte-level tokenizer, in `directory`."""
    build_tiny_model(family, **changes).save_pretrained(directory)
    save_byte_tokenizer(directory)
    return directory


def build_tiny_model(family: str, **changes: Any) -> Any:
    """A model with random weights, the same each time."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = FAMILIES[family] | IDS | changes
    if family == "phi3":
        settings["pad_token_id"] = 0
    config = AutoConfig.for_model(family, **settings)
    torch.manual_seed(20)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.generation_config.eos_token_id = 256
    return model.eval()


def save_byte_tokenizer(directory: Path, chat_template: str | None = None) -> None:
    """256 ids for the bytes and `<|end|>`, without merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate([*alphabet, "<|end|>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    wrapped.chat_template = chat_template
    wrapped.save_pretrained(directory)
