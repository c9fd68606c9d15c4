"""The operator of a release to come: it writes statuses of a version that today's does not know, with a word more."""

import sys

import pydantic.fields

from muster.words import status

status.STATUS_VERSION += 1
status.JobStatus.model_fields["schema_version"].default = status.STATUS_VERSION
status.JobStatus.__annotations__["novelty"] = "str"
status.JobStatus.model_fields["novelty"] = pydantic.fields.FieldInfo(annotation=str, default="of version 2")
status.JobStatus.model_rebuild(force=True)

from muster.operator.__main__ import main  # noqa: E402 - only now

sys.exit(main())
