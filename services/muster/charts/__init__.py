"""Charts of jobs: the browser's part, drawings for where no script runs, and the report in one file."""
