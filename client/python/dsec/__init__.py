"""dsec from Python: sandboxes, commands with streams, sessions, files, ports, snapshots, layers, environments and jobs.

`Client` is for threads, `AsyncClient` for asyncio; both have the same calls. An error (`DsecError`) means that the platform failed or
refused; how a command ended is a value (`Result`). Times are seconds, sizes octets.
"""

from ._aio.client import AsyncClient, AsyncFound
from ._aio.commands import AsyncProcess, AsyncSession
from ._aio.files import AsyncFiles
from ._aio.jobs import AsyncJob
from ._aio.ports import AsyncConnection, AsyncPort, AsyncWebSocket
from ._aio.sandbox import AsyncBatch, AsyncSandbox
from ._aio.screen import AsyncScreen
from ._config import PROTOCOL
from ._fncall import BatchAnswer, CallAnswer, CallEvent, CallFile, CallInput, CallLimits, CallResult, CallSide, Kept, PairAnswer
from ._ports import HttpResponse
from ._sync.client import Client, Found
from ._sync.commands import Process, Session
from ._sync.files import Files
from ._sync.jobs import Job
from ._sync.ports import Port, RawConnection, WebSocket
from ._sync.sandbox import Batch, Sandbox
from ._sync.screen import Screen
from ._trace import FileChange, FileHistory, PathState, Trace, TracedProcess, TracedStep
from ._websocket import Closed as WebSocketClosed
from .errors import (
    CommandFailed, DeadlineExceeded, Denied, DsecError, Exhausted, Exists, Internal, Invalid, Lost, NotFound, NotRestored, State, Unavailable, Unsupported,
    VersionMismatch,
)
from .model import (
    ApiKey, Capabilities, Cause, Chunk, CommandInfo, Environment, FileEvent, FileInfo, Image, ImportedLayer, ItemError, JobInfo, Layer, LayerName,
    Lifetime, LogRecord, NewApiKey, Outcome, Resources, Restored, RestoredStep, Result, SandboxInfo, Screenshot, Selector, SelectorResult, ServerInfo, SessionInfo, Snapshot, Stats,
    StreamEnd, Summary, UploadResult, Verdict, WriteResult,
)
from .options import CommandOptions, CreateOptions, EnvironmentOptions, RestoreOptions, RunOptions, SessionOptions, StartOptions

__version__ = "0.1.0"

__all__ = [
    "PROTOCOL", "ApiKey", "AsyncBatch", "AsyncClient", "AsyncConnection", "AsyncFiles", "AsyncFound", "AsyncJob", "AsyncPort", "AsyncProcess",
    "AsyncSandbox", "AsyncScreen", "AsyncSession", "AsyncWebSocket", "Batch", "Capabilities", "Cause", "Chunk", "Client", "CommandFailed", "CommandInfo",
    "CommandOptions", "CreateOptions", "DeadlineExceeded", "Denied", "DsecError", "Environment", "EnvironmentOptions", "Exhausted", "Exists",
    "FileEvent", "FileInfo", "Files", "Found", "HttpResponse", "Image", "ImportedLayer", "Internal", "Invalid", "ItemError", "Job", "JobInfo", "Layer",
    "LayerName", "Lifetime", "LogRecord", "Lost", "NewApiKey", "NotFound", "NotRestored", "Outcome", "Port", "Process", "RawConnection", "Resources", "RestoreOptions", "Restored", "RestoredStep", "Result",
    "RunOptions", "Sandbox", "SandboxInfo", "Screen", "Screenshot", "Selector", "SelectorResult", "ServerInfo", "Session", "SessionInfo", "SessionOptions", "Snapshot",
    "StartOptions", "State", "Stats", "StreamEnd", "Summary", "Unavailable", "Unsupported", "UploadResult", "Verdict", "VersionMismatch", "WebSocket",
    "WebSocketClosed", "WriteResult", "BatchAnswer", "CallAnswer", "CallEvent", "CallFile", "CallInput", "CallLimits", "CallResult", "CallSide", "Kept", "PairAnswer", "FileChange", "FileHistory", "PathState", "Trace", "TracedProcess", "TracedStep",
]
