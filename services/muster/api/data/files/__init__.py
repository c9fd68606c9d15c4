"""Files: data that people upload, kept by the platform where workers read it."""
