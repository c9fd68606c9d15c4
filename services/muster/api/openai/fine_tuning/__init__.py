"""`/v1/fine_tuning/jobs`: jobs in the words of OpenAI's fine-tuning API."""
