"""Another user of the machine reads nothing of the platform: tried as one."""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.integration.api.people import bearer
from tests.integration.api.platform import platform

from muster.operator.local.claim import claim_folder

NOBODY = 65534
READ = 'for file; do cat -- "$file" >/dev/null 2>&1 && echo "$file"; done; true'


def readable_by_another(files: Iterable[Path]) -> set[str]:
    """The names of those that an unprivileged user can read."""
    command = ["/bin/sh", "-c", READ, "sh", *map(str, files)]
    done = subprocess.run(
        command, user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", capture_output=True, text=True, check=True
    )
    return {Path(line).name for line in done.stdout.splitlines()}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
async def test_another_user_of_the_machine_reads_nothing_of_the_platform() -> None:
    with tempfile.TemporaryDirectory() as place:  # pytest's own folders are closed to others anyway
        os.chmod(place, 0o755)
        beside, state = Path(place) / "beside", Path(place) / "state"
        beside.write_text("for everybody")
        beside.chmod(0o644)
        umask = os.umask(0)
        try:
            claim = claim_folder(state)  # the operator may be the first
            assert stat.S_IMODE(state.stat().st_mode) == 0o700
            async with platform(state, auth=True) as here:
                headers = bearer(here.state.admin_token.read_text().strip())
                secret = {"data": {"value": "s3cr3t"}}
                made = await here.client.put("/api/v1/projects/default/secrets/x", json=secret, headers=headers)
                assert made.status_code == 201, made.text
                files = [path for path in state.rglob("*") if path.is_file()]
                kept = {"admin-token", "muster.db", "cluster.db", "secret-key"}
                assert kept <= {path.name for path in files}
                assert readable_by_another([*files, beside]) == {"beside"}
                state.chmod(0o755)
                found = readable_by_another(files)
                assert not [name for name in found if name.startswith(tuple(kept))]
        finally:
            claim.release()
            os.umask(umask)
