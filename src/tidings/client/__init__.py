"""The client side: a copy of a server's lists that is always current."""

from tidings.dependencies import check_sdk

check_sdk()  # an SDK that is too old may lack what the following modules import

from tidings.client.group import MirrorGroup  # noqa: E402
from tidings.client.mirror import Mirror, Status  # noqa: E402
from tidings.client.snapshot import Detected, ItemChange, Snapshot  # noqa: E402
from tidings.client.timing import Timing  # noqa: E402

__all__ = ["Detected", "ItemChange", "Mirror", "MirrorGroup", "Snapshot", "Status", "Timing"]
