"""`/v1/files` and `/v1/uploads`: files in the words of OpenAI's API, on the service of `/api/v1/files`."""
