"""How a model makes vectors, as its files say; what they do not say is refused."""

import json
from typing import Any

import pytest

from shared import encoders
from shared.encoders import Encoder
from shared.errors import BadRequest

OLD = "sentence_transformers.models."
NEW = "sentence_transformers.sentence_transformer.modules.pooling."
CONFIG = {"model_type": "bert", "max_position_embeddings": 512}
POOLING = {"word_embedding_dimension": 384, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


def modules(*names: str, prefix: str = OLD) -> list[dict[str, Any]]:
    return [
        {"path": "" if not number else f"{number}_{name}", "type": prefix + name} for number, name in enumerate(names)
    ]


ALL = modules("Transformer", "Pooling", "Normalize")


def find(config: Any = CONFIG, listed: Any = ALL, pooling: Any = POOLING, **more: Any) -> Encoder | None:
    files = {"modules.json": listed, "1_Pooling/config.json": pooling}
    files |= {name + ".json": content for name, content in more.items()}
    raw = {name: json.dumps(content).encode() for name, content in files.items() if content is not None}
    return encoders.find(json.dumps(config).encode(), raw.get)


def test_the_files_of_sentence_transformers_say_it_all() -> None:
    known = Encoder(dimensions=384, length=512, positions=512, pooling="mean_tokens", normalized=True)
    assert find() == known
    assert find(listed=None) is None, "a model that generates"
    plain = find(
        listed=modules("Transformer", "Pooling", prefix=NEW), pooling={"embedding_dimension": 8, "pooling_mode": "cls"}
    )
    assert plain == Encoder(dimensions=8, length=512, positions=512, pooling="cls_token", normalized=False)
    limited = find(sentence_bert_config={"max_seq_length": 256, "do_lower_case": True})
    assert limited is not None
    assert (limited.length, limited.positions, limited.lower_case) == (256, 512, True)
    offset = find({"model_type": "xlm-roberta", "max_position_embeddings": 514, "pad_token_id": 1})
    assert offset is not None
    assert (offset.length, offset.positions) == (512, 512)
    for values, shorter in (({"is_matryoshka": True}, ()), ({"matryoshka_dimensions": [64, 128]}, (64, 128))):
        cut = find(CONFIG | values)
        assert cut is not None
        assert cut.shorter == shorter


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"listed": modules("Transformer", "Pooling", "Dense")}, "its modules are Transformer, Pooling, Dense"),
        ({"listed": modules("Transformer")}, "its modules are Transformer:"),
        ({"listed": [ALL[0] | {"path": "0_Transformer"}, *ALL[1:]]}, "in the directory 0_Transformer"),
        ({"listed": {}}, "modules.json cannot be read"),
        ({"pooling": POOLING | {"pooling_mode_cls_token": True}}, "pools by cls_token and mean_tokens"),
        (
            {"pooling": {"word_embedding_dimension": 4, "pooling_mode_weightedmean_tokens": True}},
            "by weightedmean_tokens",
        ),
        ({"pooling": None}, "pools by nothing that is known"),
        ({"pooling": {"pooling_mode_mean_tokens": True}}, "dimensions"),
        ({"pooling": POOLING | {"word_embedding_dimension": 0}}, "dimensions"),
        ({"config": {"model_type": "bert"}}, "max_position_embeddings"),
        ({"config": CONFIG | {"matryoshka_dimensions": "all"}}, "shorter"),
        ({"config_sentence_transformers": {"default_prompt_name": "query"}}, "'query' before each text"),
    ],
)
def test_what_is_not_served_is_refused_and_says_why(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        find(**change)


def test_lengths_and_dimensions_are_what_the_model_has_room_for() -> None:
    known = Encoder(dimensions=8, length=256, positions=512, pooling="mean_tokens", normalized=True, shorter=(2, 4))
    assert [encoders.length(known, wanted) for wanted in (None, 100, 512)] == [256, 100, 512]
    with pytest.raises(BadRequest, match="max_model_len 513 is not within the model's 512 tokens"):
        encoders.length(known, 513)
    for wanted in (0, 2, 4, 8):
        encoders.check_dimensions(known, wanted)
    with pytest.raises(BadRequest, match="can be cut to 2, 4, 8, not to 3"):
        encoders.check_dimensions(known, 3)
    with pytest.raises(BadRequest, match="have 8, not 9"):
        encoders.check_dimensions(known, 9)
