"""Model files of the service: read once, and again when they change. What a request names is never taken for a path."""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from threading import Lock

from autotuner.errors import ModelError, NotFoundError, ServiceError
from autotuner.ir.models import Model, ModelFile, known_models, load_model, parse_reference, search_spaces_dir
from autotuner.ir.records import Scalar

KEPT_MODELS = 1024

Stamp = tuple[int, int]


class ModelFiles:
    """The known models, and those of them that were asked for with their extents, options and dtype chosen."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._directory = search_spaces_dir() / "models"
        self._listed: tuple[Stamp, dict[str, Path]] = ((0, 0), {})
        self._files: dict[Path, tuple[Stamp, ModelFile]] = {}
        self._models: OrderedDict[Hashable, Model] = OrderedDict()

    def names(self) -> list[str]:
        return list(self._paths())

    def file(self, name: str) -> ModelFile:
        """Return a model file by the model's name.

        Raises:
            NotFoundError: there is none of this name.
            ServiceError: the file cannot be used.
        """
        return self._read(name)[1]

    def model(
        self, reference: str, extents: Mapping[str, int], options: Mapping[str, Scalar], dtype: str | None
    ) -> Model:
        """Return the model that a reference such as "bert-encoder:tiny" names, with some of its values replaced.

        Raises:
            NotFoundError: there is no such model or preset.
            ModelError: there is no such axis or option, or a value is not valid.
        """
        try:
            name, preset = parse_reference(reference)
        except ModelError:
            raise NotFoundError(f'{reference!r} is no model: write "name" or "name:preset"; {self._known()}') from None
        stamp, file = self._read(name)
        chosen = tuple((option, type(value), value) for option, value in options.items())
        key = (stamp, name, preset, tuple(extents.items()), chosen, dtype)
        with self._lock:
            found = self._models.get(key)
        if found is None:
            found = instantiated(file, preset, extents, options, dtype)
            with self._lock:
                self._models[key] = found
                while len(self._models) > KEPT_MODELS:
                    self._models.popitem(last=False)
        return found

    def _read(self, name: str) -> tuple[Stamp, ModelFile]:
        path = self._paths().get(name)
        if path is None:
            raise NotFoundError(f"no model {name!r}; {self._known()}; the content of a model file can be sent instead")
        try:
            stamp = _stamp(path)
            kept = self._files.get(path)
            if kept is None or kept[0] != stamp:
                definition = load_model(str(path)).definition
                kept = self._files[path] = stamp, ModelFile(f"model {name!r}", definition)
        except (ModelError, OSError) as error:
            raise ServiceError(f"model {name!r} of the service cannot be used: {error}") from error
        return kept

    def _paths(self) -> Mapping[str, Path]:
        stamp = _stamp(self._directory)
        listed, paths = self._listed
        if listed != stamp:
            paths = known_models()
            self._listed = stamp, paths
        return paths

    def _known(self) -> str:
        return f"known: {', '.join(self.names())}"


def instantiated(
    file: ModelFile,
    preset: str | None,
    extents: Mapping[str, int],
    options: Mapping[str, Scalar],
    dtype: str | None,
) -> Model:
    """Return a file's model with these values.

    Raises:
        NotFoundError: the file has no such preset.
        ModelError: it has no such axis or option, or a value is not valid.
    """
    presets = file.definition.presets
    if preset is not None and preset not in presets:
        raise NotFoundError(f"{file.origin} has no preset {preset!r}; known: {_listed(list(presets))}")
    return file.instantiate(preset, extents, options, dtype)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _stamp(path: Path) -> Stamp:
    status = path.stat()
    return status.st_mtime_ns, status.st_size
