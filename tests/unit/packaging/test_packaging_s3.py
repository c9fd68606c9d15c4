"""How S3 is reached is said once for operator, API and workers."""

from tests.unit.packaging.chart import Chart, environment, pod_specs

from muster.storage.settings import S3Settings, platform_variables


def test_operator_and_api_reach_s3_in_one_way(chart: Chart) -> None:
    """The operator's own settings were boto3's, the workers' were Muster's, and only the tests could set the latter."""
    specs = pod_specs(chart.objects({"s3": {"endpoint": "https://minio.example.com", "addressing": "virtual"}}))
    for name in ("muster-operator", "muster-api"):
        given = environment(specs[name]["containers"][0])
        settings = S3Settings.from_environment(given)
        assert (settings.endpoint, settings.addressing) == ("https://minio.example.com", "virtual")
        assert platform_variables(given) == {key: given[key] for key in given if key.startswith("MUSTER_S3_")}
