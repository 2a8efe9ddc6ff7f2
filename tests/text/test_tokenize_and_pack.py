"""UTF-8 bytes of tokens, documents packed into rows: each one once, and rows nearly full."""

import numpy as np

from src.text.tokenize_and_pack import pack, packed_positions, token_bytes


def test_bytes_of_gaps_and_special_tokens():
    # A special token covers nothing, a skipped blank belongs to the token after it, a character in several tokens
    # counts once.
    assert token_bytes("ab é", [(0, 0), (0, 2), (3, 4), (3, 4), (0, 0)]).tolist() == [0, 2, 3, 0, 0]


def documents(count, longest):
    """Return ragged documents, each of its own token id, as the columns that `pack` gets."""
    generator = np.random.default_rng(0)
    lengths = 1 + (longest * generator.random(count) ** 2).astype(int)
    batch = {
        "input_ids": [[d] * int(n) for d, n in enumerate(lengths)],
        "length": lengths.tolist(),
        "targets": [max(0, int(n) - 1) for n in lengths],
        "bytes": [3 * int(n) for n in lengths],
        "cut": [0] * count,
    }
    batch["labels"] = [[-100 if i % 2 else d for i in range(n)] for d, n in enumerate(batch["length"])]
    return batch


def test_every_document_is_complete_in_exactly_one_row():
    batch = documents(2000, 256)
    packed = pack(256, batch)
    with_targets = [d for d, n in enumerate(batch["length"]) if n > 1]  # one token predicts nothing
    seen = []
    for i, row in enumerate(packed["input_ids"]):
        sizes = packed["documents"][i]
        assert sum(sizes) == len(row) == packed["length"][i] <= 256
        assert packed["targets"][i] == len(row) - len(sizes)
        ends = np.cumsum(sizes)
        for start, end in zip(ends - sizes, ends, strict=True):
            seen.append(row[start])
            assert row[start:end] == batch["input_ids"][row[start]]
            assert packed["labels"][i][start:end] == batch["labels"][row[start]]
    assert sorted(seen) == with_targets
    assert sum(packed["bytes"]) == sum(batch["bytes"][d] for d in with_targets)


def test_best_fit_by_hand():
    # Longest first: 6 | 5 | 4 joins 6 (nothing left) | 3 joins 5 (2 left, the tightest) | 2 joins 5+3.
    batch = documents(5, 1) | {"input_ids": [[n] * n for n in (2, 3, 4, 5, 6)], "length": [2, 3, 4, 5, 6]}
    assert pack(10, batch)["documents"] == [[6, 4], [5, 3, 2]]
    assert pack(8, documents(5, 1))["input_ids"] == []  # only documents of one token


def test_padding_does_not_continue_a_document():
    """It counts from zero, so transformers sees padding as a document of its own."""
    assert packed_positions(np.array([3, 2]), 5).tolist() == [0, 1, 2, 0, 1]
    assert packed_positions(np.array([2]), 5).tolist() == [0, 1, 0, 1, 2]
