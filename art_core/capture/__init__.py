"""Capture of model calls at the HTTP layer: transports, scopes, and the trajectories made of them."""

from art_core.capture.build import build_trajectory
from art_core.capture.call import CapturedCall
from art_core.capture.loss import Loss, losses
from art_core.capture.roles import ROLE_HEADER, current_role, role
from art_core.capture.scope import ROLLOUT_HEADER, CaptureScope, capture, current_scope
from art_core.capture.transport import CaptureTransport, SyncCaptureTransport

__all__ = [
    "ROLE_HEADER",
    "ROLLOUT_HEADER",
    "CaptureScope",
    "CaptureTransport",
    "CapturedCall",
    "Loss",
    "SyncCaptureTransport",
    "build_trajectory",
    "capture",
    "current_role",
    "current_scope",
    "losses",
    "role",
]
