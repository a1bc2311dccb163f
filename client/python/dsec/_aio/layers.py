"""Layers, environments and API keys."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, List, Optional

from .. import _ops as ops
from .._octets import JSON, Fields, milliseconds
from .._body import Body, Source, again, body_of
from .._tar import pack
from ..model import ApiKey, Environment, ImportedLayer, Layer, LayerName, NewApiKey
from .files import LocalPath
from .transport import Transport

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..options import EnvironmentOptions


class AsyncLayers:
    """Immutable trees, named by their content; a name has versions, as in base/debian@3."""

    def __init__(self, transport: Transport) -> None:
        self._t = transport

    async def import_tar(self, tar: Source, publish: str = "", *, source: str = "tar", timeout: Optional[float] = None) -> ImportedLayer:
        """Makes a layer from a tar (uncompressed): bytes, a file or an iterable of bytes. With a name it becomes its current version."""
        return await self._import(body_of(tar), publish, source, timeout)

    async def import_folder(
        self, folder: LocalPath, publish: str = "", *, at: str = "/", source: str = "folder", skipped: Optional[List[str]] = None,
        timeout: Optional[float] = None,
    ) -> ImportedLayer:
        """Makes a layer from a local folder, laid at `at`. What can't be sent is added to `skipped`."""
        path = os.fspath(folder)
        if not os.path.isdir(path):
            raise NotADirectoryError(path)
        return await self._import(again(lambda: pack(path, at, skipped)), publish, source, timeout)

    async def _import(self, tar: Body, publish: str, source: str, timeout: Optional[float]) -> ImportedLayer:
        target = ops.import_route(publish, source)
        # A second attempt would make a second version of the name, so only a nameless import is sent again.
        return ImportedLayer.of(Fields(await self._t.upload("PUT", target, {"Content-Type": "application/x-tar"}, tar, timeout, not publish)))

    async def get(self, ref: str) -> Layer:
        """By ID, name or name@version."""
        return Layer.of((await self._t.run(ops.call("LayerService/GetLayer", {"ref": ref}))).sub("layer"))

    async def list(self, prefix: str = "") -> List[LayerName]:
        """All names that begin so, with their versions."""
        return await self._t.run(ops.list_layers(prefix))

    async def publish(self, name: str, layer: str) -> str:
        """Makes a layer the current version of a name and answers name@version."""
        return (await self._t.run(ops.call("LayerService/PublishLayer", {"name": name, "layer": layer}, safe=False))).text("published")

    async def rollback(self, name: str, version: int) -> LayerName:
        """Makes an earlier version current. Published environments keep what they were resolved to."""
        return LayerName.of((await self._t.run(ops.call("LayerService/RollbackLayer", {"name": name, "version": version}))).sub("name"))

    async def remove(self, ref: str) -> None:
        """Removes a version, or all of a name."""
        await self._t.run(ops.call("LayerService/RemoveLayer", {"ref": ref}, safe=False))


class AsyncEnvironments:
    """Base, workspace and tool kits with defaults, under a name with versions."""

    def __init__(self, transport: Transport) -> None:
        self._t = transport

    async def publish(self, name: str, **options: Unpack[EnvironmentOptions]) -> Environment:
        """Makes a new version. Options: see `EnvironmentOptions`."""
        ops.check_keywords("environments.publish", options)
        body = ops.environment_body(name, **options)
        return Environment.of((await self._t.run(ops.call("LayerService/PublishEnvironment", body, safe=False))).sub("environment"))

    async def get(self, ref: str) -> Environment:
        """By name or name@version."""
        return Environment.of((await self._t.run(ops.call("LayerService/GetEnvironment", {"ref": ref}))).sub("environment"))

    async def versions(self, name: str) -> List[int]:
        """The versions of a name."""
        return (await self._t.run(ops.call("LayerService/GetEnvironment", {"ref": name}))).ints("versions")

    async def list(self, prefix: str = "") -> List[Environment]:
        """The current version of each name that begins so."""
        return await self._t.run(ops.list_environments(prefix))

    async def rollback(self, name: str, version: int) -> Environment:
        """Makes an earlier version current."""
        body: JSON = {"name": name, "version": version}
        return Environment.of((await self._t.run(ops.call("LayerService/RollbackEnvironment", body))).sub("environment"))

    async def remove(self, ref: str) -> None:
        """Removes a version, or all of a name."""
        await self._t.run(ops.call("LayerService/RemoveEnvironment", {"ref": ref}, safe=False))


class AsyncKeys:
    """API keys of the caller's project and of those below it."""

    def __init__(self, transport: Transport) -> None:
        self._t = transport

    async def create(self, *, project: str = "", note: str = "", ttl: Optional[float] = None) -> NewApiKey:
        """Makes a key; its text is told only here. `ttl` is in seconds, None: it never expires."""
        body = ops.without_empty({"project": project, "note": note, "ttl_ms": milliseconds(ttl, "ttl")})
        return NewApiKey.of(await self._t.run(ops.call("IamService/CreateKey", body, safe=False)))

    async def list(self) -> List[ApiKey]:
        """All of them, without their texts."""
        return (await self._t.run(ops.call("IamService/ListKeys", {}))).subs("keys", ApiKey.of)

    async def revoke(self, id: str) -> None:
        """Ends a key."""
        await self._t.run(ops.call("IamService/RevokeKey", {"id": id}, safe=False))
