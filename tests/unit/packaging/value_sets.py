"""What people install: one set of values for each kind of cluster, and one that turns everything on."""

from typing import Any

MONITORED: dict[str, Any] = {
    "metrics": {
        "podMonitor": {"enabled": True, "additionalLabels": {"release": "kps"}},
        "serviceMonitor": {"enabled": True, "additionalLabels": {"release": "kps"}},
        "prometheusRule": {
            "enabled": True,
            "additionalLabels": {"release": "kps"},
            "runbookUrl": "https://runbooks.example.com/",
        },
    },
    "grafana": {"dashboards": {"enabled": True, "annotations": {"grafana_folder": "Muster"}}},
}
EVERYTHING: dict[str, Any] = MONITORED | {
    "global": {"imageRegistry": "registry.example.com/ml", "imagePullSecrets": ["pull"]},
    "operator": {
        "awsRoleArn": "arn:aws:iam::123456789012:role/muster",
        "env": [{"name": "AWS_REGION", "value": "eu-west-1"}],
        "envFrom": [{"secretRef": {"name": "s3"}}],
        "prometheus": {"url": "http://prometheus.monitoring:9090"},
        "webhook": {"existingSecret": "alertmanager", "key": "bearer"},
        "podAnnotations": {"a": "1"},
        "podLabels": {"team": "infra"},
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
        "tolerations": [{"key": "infra", "operator": "Exists"}],
        "priorityClassName": "infra",
    },
    "prices": {"p5.48xlarge": {"gpus": 8, "onDemand": 55.04, "spot": 20.5}},
    "workers": {
        "checkpointUri": "s3://ckpt/muster",
        "imagePullSecrets": ["pull"],
        "namespaceLimits": {"team": 64},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
    },
    "api": {
        "replicas": 2,
        "database": {"existingSecret": "database"},
        "bootstrapToken": {"existingSecret": "token"},
        "secrets": {"namespaces": ["nlp", "cv"]},
        "oidc": {
            "issuer": "https://id.example.com",
            "clientId": "muster",
            "audience": "muster-api",
            "scopes": ["openid", "groups"],
            "personClaim": "email",
            "groupsClaim": "realm_access.roles",
            "roles": {"ml": {"nlp": "member"}, "platform": "admin"},
        },
        "persistence": {"storageClassName": "gp3"},
        "env": [{"name": "AWS_REGION", "value": "eu-west-1"}],
        "envFrom": [{"secretRef": {"name": "s3"}}],
        "podAnnotations": {"a": "1"},
        "podLabels": {"team": "infra"},
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
        "tolerations": [{"key": "infra", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "service": {"annotations": {"a": "1"}},
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "host": "muster.example.com",
            "tlsSecretName": "tls",
            "annotations": {"a": "1"},
        },
    },
    "agent": {
        "enabled": True,
        "xidTable": {"63": {"remedy": "drain", "name": "remapped"}},
        "runtimeClassName": "nvidia",
        "nodeSelector": {"nvidia.com/gpu.present": "true"},
        "priorityClassName": "infra",
    },
    "networkPolicy": {
        "enabled": True,
        "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        "apiFrom": [{"podSelector": {"matchLabels": {"app": "gateway"}}}],
    },
    "extraObjects": [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "extra", "namespace": "{{ .Release.Namespace }}"},
            "data": {"release": "{{ .Release.Name }}"},
        }
    ],
}
SETS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "eks": {
        "operator": {"awsRoleArn": "arn:aws:iam::123456789012:role/muster"},
        "workers": {"checkpointUri": "s3://ckpt/muster", "serviceAccount": "training"},
    },
    "other-s3": {
        "operator": {
            "envFrom": [{"secretRef": {"name": "s3"}}],
        },
        "s3": {"endpoint": "http://s3.storage:8333", "region": "eu-1", "addressing": "virtual", "kmsKeyId": "key"},
        "networkPolicy": {"enabled": True},
    },
    "one-small-cluster": {
        "operator": {"replicas": 1, "pdb": {"enabled": False}, "affinity": {"podAntiAffinity": {}}},
        "rbac": {"aggregateToDefaultRoles": False},
        "crds": {"keep": False},
    },
    "without-the-api": {"api": {"enabled": False}, "networkPolicy": {"enabled": True}},
    "forgetful": {"api": {"persistence": {"enabled": False}}, "networkPolicy": {"enabled": True}},
    "postgresql": {"api": {"database": {"existingSecret": "muster"}, "bootstrapToken": {"existingSecret": "muster"}}},
    "monitored": MONITORED,
    "with-the-agent": {"agent": {"enabled": True}},
    "air-gapped": {
        "global": {"imageRegistry": "registry.local:5000", "imagePullSecrets": ["pull"]},
        "operator": {"image": {"digest": f"sha256:{'a' * 64}"}},
        "crds": {"install": False},
    },
    "everything": EVERYTHING,
}
