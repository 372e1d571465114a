"""A Llama of any size with random weights, written in seconds: for what depends on shapes and not on sense."""

from pathlib import Path


def save_random_llama(
    directory: Path,
    hidden: int = 2048,
    layers: int = 16,
    heads: int = 32,
    key_heads: int = 8,
    vocabulary: int = 32_000,
    length_max: int = 16_384,
) -> Path:
    """In bfloat16, with heads of hidden / heads numbers and a byte-level tokenizer. The defaults have 1.1e9 weights."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=length_max,
        eos_token_id=256,
        bos_token_id=None,
        dtype="bfloat16",
    )
    torch.manual_seed(3)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    del model
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate([*alphabet, "<|end|>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(directory)
    return directory
