"""Make a bucket, unless it is there: make_bucket.py NAME. Address and credentials: AWS_*."""

import sys

import boto3
from botocore.exceptions import ClientError


def main(name: str) -> int:
    try:
        boto3.client("s3").create_bucket(Bucket=name)
    except ClientError as error:
        if error.response["Error"]["Code"] not in ("BucketAlreadyExists", "BucketAlreadyOwnedByYou"):
            print(f"can't make the bucket {name}: {error}", file=sys.stderr)
            return 1
    print(f"the bucket {name} is there")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
