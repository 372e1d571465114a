"""GGUF files: converted to the Hugging Face layout, which is what a version is made of."""

import os
from pathlib import Path

from shared.errors import BadRequest

SUFFIX = ".gguf"


def convert(file: Path, directory: Path) -> None:
    """Write the model of a GGUF file into `directory`: safetensors in bf16, tokenizer, chat template.

    Quantized weights are expanded: the process needs the size of the model in bf16 and once more in part. Blocking, seconds
    to minutes. Raises BadRequest for what is no GGUF file, and for an architecture that the library does not know.
    """
    if not file.is_file():
        raise BadRequest(f"{file} is no file", param="path")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            quantization_config=transformers.GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
    except Exception as error:  # a library's errors over a file of any origin
        raise BadRequest(f"{file} cannot be converted: {type(error).__name__}: {error}", param="path") from error
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
