"""What a FLARE site allows others: our job and nothing else. Needs no FLARE itself.

Two files in a startup kit's `local` folder say it: `authorization.json`, which commands of an
administrator are carried out, and `resources.json`, which classes a job may name.
`unalike.cross_silo.guard` checks at the site what these two cannot.
"""

import json
from pathlib import Path
from typing import Any

ALLOWED_CLASSES = {
    "server": [
        "nvflare.collab.runtime.controller.CollabController",
        "unalike.cross_silo.flare.FlareServer",
    ],
    "client": [
        "nvflare.collab.runtime.executor.CollabExecutor",
        "unalike.cross_silo.flare.FlareClient",
    ],
}
JOB_GUARD = {"path": "unalike.cross_silo.guard.JobGuard", "args": {}}
COMMAND_GUARD = {
    "id": "unalike_command_guard",
    "path": "unalike.cross_silo.guard.CommandGuard",
    "args": {},
}

# Rights and groups of rights by FLARE's names. What is not listed is denied; "none" is for readers.
DENIED = {"byoc": "none", "clone_job": "none", "download_job": "none", "operate": "none"}
DENIED |= {"server-predeployed-flwr": "none", "shell_commands": "none"}
WATCH = {"check_status": "any", "get_job_meta": "any", "list_jobs": "any"}
MEMBERS = {"disable_client": "any", "enable_client": "any", "remove_client": "any"}
PERMISSIONS: dict[str, dict[str, str]] = {
    "project_admin": DENIED | WATCH | MEMBERS | {"submit_job": "any", "abort_job": "any"},
    "lead": DENIED | WATCH | {"submit_job": "any", "abort_job": "n:submitter"},
    "org_admin": DENIED | WATCH,
    "member": DENIED | WATCH,
}


def client_config() -> dict[str, Any]:
    """`config_fed_client.json` of our jobs, the same in each of them: a site compares it."""
    executor, client = ALLOWED_CLASSES["client"]
    return {
        "format_version": 2,
        "task_data_filters": [],
        "task_result_filters": [],
        "executors": [
            {
                "tasks": ["*"],
                "executor": {"path": executor, "args": {"client_obj_id": "client"}},
            }
        ],
        "components": [{"id": "client", "path": client, "args": {}}],
    }


def write_authorization(local: Path) -> str | None:
    """Write `authorization.json` into a startup kit's `local` folder.

    A file that allows the same or less is left as it is. One that allows more is kept as
    `authorization.json.replaced`, which FLARE does not read.

    Returns: what was replaced, as a sentence for the site's people; None if nothing was.
    """
    path = local / "authorization.json"
    content = json.dumps({"format_version": "1.0", "permissions": PERMISSIONS}, indent=1)
    if not path.exists():
        path.write_text(content)
        return None
    if allows_no_more(path.read_text()):
        return None
    old = path.replace(path.with_name("authorization.json.replaced"))
    path.write_text(content)
    return (
        f"{path} allowed others more than unalike's jobs and was replaced: "
        f"what it said is in {old.name}"
    )


def allows_no_more(content: str) -> bool:
    """Whether an `authorization.json` with this content gives no role more than PERMISSIONS."""
    try:
        for role, rights in json.loads(content)["permissions"].items():
            for right, grant in rights.items():
                permitted = PERMISSIONS.get(role, {}).get(right, "none")
                if permitted != "any" and grant not in ("none", permitted):
                    return False
    except (ValueError, KeyError, TypeError, AttributeError):
        return False  # not FLARE's form, or a role that may do everything: "project_admin": "any"
    return True
