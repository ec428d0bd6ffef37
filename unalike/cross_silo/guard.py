"""Runs in a site's FLARE process and refuses what is not our job, whoever asks.

`authorization.json` is not enough for that: FLARE's client believes the server who an administrator
is, and whether a command needs to be authorised. Here that does not matter.
"""

import json
from pathlib import Path

from nvflare.apis.app_validation import AppValidator
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.lighter.tool_consts import NVFLARE_SIG_FILE, NVFLARE_SUBMITTER_CRT_FILE
from nvflare.private.defs import TrainingTopic

from unalike.cross_silo.policy import client_config

CONFIG = Path("config/config_fed_client.json")
FILES = {CONFIG, Path("config/config_fed_server.json")}  # of our job, as a site gets it
SIGNATURES = {NVFLARE_SIG_FILE, NVFLARE_SUBMITTER_CRT_FILE}  # put beside them by FLARE
TOPICS = {
    TrainingTopic.ABORT,
    TrainingTopic.CANCEL_RESOURCE,
    TrainingTopic.CHECK_RESOURCE,
    TrainingTopic.CHECK_STATUS,
    TrainingTopic.DEPLOY,
    TrainingTopic.NOTIFY_JOB_STATUS,
    TrainingTopic.START_JOB,
}


class JobGuard(AppValidator):
    """A site's `app_validator`: a job that is not ours is deleted instead of started."""

    def validate(self, app_folder: str) -> tuple[str, dict]:
        """FLARE's question about a job that arrived.

        Returns: why it is refused, "" for ours; and what FLARE should know of it, nothing.
        """
        app = Path(app_folder)
        for path in sorted(app.rglob("*")):
            file = path.relative_to(app)
            folder = path.is_dir() and not path.is_symlink()
            if not folder and file not in FILES and file.name not in SIGNATURES:
                return f"this site runs unalike's job, which has no file {file}", {}
        try:
            config = json.loads((app / CONFIG).read_text())
        except (OSError, ValueError) as error:
            return f"this site runs unalike's job, whose {CONFIG} can be read: {error}", {}
        if config != client_config():
            return f"this site runs unalike's job, and {CONFIG} is of another", {}
        return "", {}


class CommandGuard(FLComponent):
    """A component of a site's FLARE process, which leaves it only commands that a job needs: none
    reads files, changes logs or stops the site."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type != EventType.SYSTEM_START:
            return
        processors = fl_ctx.get_engine().admin_agent.processors
        for topic in set(processors) - TOPICS:
            del processors[topic]
