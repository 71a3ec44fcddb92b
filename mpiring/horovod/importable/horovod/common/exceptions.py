"""Horovod's errors."""

from mpiring.torch.exceptions import HorovodInternalError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt", "get_version_mismatch_message"]


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job have changed. For programs that catch it: mpiring has no elastic jobs, and never raises it."""

    def __init__(self, skip_sync: bool = False):
        self.skip_sync = skip_sync


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return what is wrong with a library's version."""
    return f"Framework {name} installed with version {installed_version} but found version {version}."


class HorovodVersionMismatchError(ImportError):
    """Horovod was compiled for another PyTorch. For programs that catch it: mpiring is not compiled, and never raises it."""

    def __init__(self, name: str, version: str, installed_version: str):
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name, self.version, self.installed_version = name, version, installed_version
