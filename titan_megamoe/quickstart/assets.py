"""Everything TorchTitan reads from disk, made on the spot and without a network.

The text is the source code of Python's standard library, which every machine that runs this has.
The tokenizer is a byte-level BPE trained on it.
"""

from __future__ import annotations

import json
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
_MIN_CHARACTERS, _MAX_CHARACTERS = 2_000, 60_000
"""Size of the source files that are taken: no empty packages, no generated tables."""


@dataclass(frozen=True)
class Assets:
    """Paths for a TorchTitan job: `[model] hf_assets_path` and `[training] dataset_path`."""

    tokenizer: Path  # folder with tokenizer.json and tokenizer_config.json
    dataset: Path  # folder with one JSON-lines file, a field "text" in each line
    documents: int = 0  # 0: not counted
    characters: int = 0

    @classmethod
    def given(cls, tokenizer: Path, dataset: Path) -> Assets:
        """Somebody's own, as they are."""
        return cls(tokenizer.resolve(), dataset.resolve())


def prepare(
    folder: Path,
    vocabulary: int,
    max_characters: int = 4_000_000,
    say: Callable[[str], None] = lambda _: None,
) -> Assets:
    """Write tokenizer and data set under `folder`, or take what an earlier call with equal sizes
    left.

    Args:
        vocabulary: tokens of the BPE, at least 257.
        max_characters: stop collecting text there.
        say: told what is going on.

    Raises:
        RuntimeError: the standard library's sources are not on this machine.
    """
    done = folder / "assets.json"
    wanted = {"vocabulary": vocabulary, "max_characters": max_characters}
    if done.exists():
        found = json.loads(done.read_text())
        if found["wanted"] == wanted:
            say("assets: found from an earlier run")
            return _assets(folder, found["documents"], found["characters"])

    documents = list(_standard_library(max_characters))
    if not documents:
        raise RuntimeError(
            f"no Python sources under {sysconfig.get_path('stdlib')}: this Python is installed "
            "without its standard library's .py files; use one that has them."
        )
    characters = sum(map(len, documents))
    say(f"text: {len(documents)} files, {characters / 1e6:.1f} million characters")

    (folder / "data").mkdir(parents=True, exist_ok=True)
    with (folder / "data" / "train.jsonl").open("w", encoding="utf-8") as lines:
        for text in documents:
            lines.write(json.dumps({"text": text}) + "\n")

    (folder / "tokenizer").mkdir(exist_ok=True)
    size = _train_tokenizer(documents, folder / "tokenizer", vocabulary)
    say(f"tokenizer: byte-level BPE with {size} tokens")
    summary = {"wanted": wanted, "documents": len(documents), "characters": characters}
    done.write_text(json.dumps(summary))
    return _assets(folder, len(documents), characters)


def from_text(
    dataset: Path,
    folder: Path,
    vocabulary: int,
    tokenizer: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Assets:
    """Somebody's own text, with their tokenizer or one that is trained on it.

    Args:
        dataset: a file of JSON lines with a field "text" (copied under `folder`, since TorchTitan's loader
            takes folders), or a folder of such files.
        vocabulary: tokens of the BPE that is trained where `tokenizer` is None.

    Raises:
        ConfigError: there is no such text.
    """
    files = [dataset] if dataset.is_file() else sorted(dataset.glob("*.json*"))
    if not files:
        raise ConfigError(
            f"{dataset}: neither a file of JSON lines nor a folder with some (*.jsonl, *.json)."
        )
    if dataset.is_file():
        target = folder / "data"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        shutil.copyfile(dataset, target / f"{dataset.stem}.jsonl")
        dataset = target
    try:
        documents = [json.loads(line)["text"] for file in files for line in file.open(encoding="utf-8")]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{files[0].parent}: a line is not a JSON object with a field text ({error})."
        ) from None
    characters = sum(map(len, documents))
    say(f"text: {len(documents)} documents, {characters / 1e6:.1f} million characters")
    if tokenizer is None:
        tokenizer = folder / "tokenizer"
        tokenizer.mkdir(parents=True, exist_ok=True)
        size = _train_tokenizer(documents, tokenizer, vocabulary)
        say(f"tokenizer: byte-level BPE with {size} tokens")
    return Assets(tokenizer.resolve(), dataset.resolve(), len(documents), characters)


def _assets(folder: Path, documents: int, characters: int) -> Assets:
    return Assets(folder / "tokenizer", folder / "data", documents, characters)


def _standard_library(max_characters: int) -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    left = max_characters
    for path in sorted(root.rglob("*.py")):
        skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
        if skipped & set(path.relative_to(root).parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if not _MIN_CHARACTERS <= len(text) <= _MAX_CHARACTERS:
            continue
        yield text
        left -= len(text)
        if left <= 0:
            return


def _train_tokenizer(documents: list[str], folder: Path, vocabulary: int) -> int:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "add_bos_token": False,
        "add_eos_token": True,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    return tokenizer.get_vocab_size()
