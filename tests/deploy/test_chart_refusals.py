"""Values that cannot work are refused before anything is installed, by the name of the value."""

import helm_python
import pytest

ENGINE = {"name": "a", "model": "m"}
ETCD = {"endpoints": ["etcd:2379"]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gatway": {}}, "gatway"),
        ({"gateway": {"config": {"request_timeout": 3}}}, "/gateway/config.*request_timeout"),
        ({"gateway": {"config": {"port": 1}}}, "/gateway/config.*port"),
        ({"balancer": {"config": {"carry_on": "sometimes"}}}, "/balancer/config/carry_on"),
        ({"balancer": {"config": {"max_attempts": 0}}}, "/balancer/config/max_attempts"),
        ({"engines": [{"name": "a"}]}, "/engines/0.*model"),
        ({"engines": [ENGINE | {"config": {"dtype": "int3"}}]}, "/engines/0/config/dtype"),
        ({"engines": [ENGINE | {"device": "tpu"}]}, "/engines/0/device"),
        ({"engines": [ENGINE | {"name": "Llama_8B"}]}, "/engines/0/name"),
        ({"engines": [ENGINE | {"loadSeconds": 0}]}, "/engines/0/loadSeconds"),
        ({"engines": [ENGINE, ENGINE]}, r"engines\[1\].name"),
        ({"engines": [ENGINE | {"device": "cuda", "gpus": 0}]}, r"engines\[0\].gpus"),
        (
            {"engines": [ENGINE | {"modelVolume": {"hostPath": "/m", "existingClaim": "m"}}]},
            r"engines\[0\].modelVolume",
        ),
        ({"engines": [ENGINE | {"modelVolume": {"hostPath": "models"}}]}, "modelVolume/hostPath"),
        ({"redis": {"url": "redis://user:secret@host:6379/0"}}, "/redis/url"),
        ({"redis": {"auth": {"existingSecret": "s"}}}, "redis.url"),
        (
            {"redis": {"url": "redis://h:1/0", "tls": {"existingSecret": "s"}}},
            "redis.tls.existingSecret",
        ),
        ({"redis": {"builtin": False}}, "redis.url"),
        ({"etcd": {"builtin": False}}, "etcd.endpoints"),
        ({"etcd": {"endpoints": ["http://etcd:2379"]}}, "/etcd/endpoints/0"),
        ({"etcd": {"auth": {"user": "u", "existingSecret": "s"}}}, "etcd.endpoints: needed"),
        ({"etcd": {"tls": {"existingSecret": "s"}}}, "etcd.endpoints: needed"),
        ({"etcd": ETCD | {"auth": {"user": "u"}}}, "etcd.auth.existingSecret: needed"),
        ({"etcd": ETCD | {"auth": {"existingSecret": "s"}}}, "etcd.auth.user: needed"),
        (
            {"etcd": ETCD | {"tls": {"clientCertificate": True}}},
            "etcd.tls.existingSecret: needed",
        ),
        ({"balancer": {"config": {"etcd_user": "u"}}}, "/balancer/config.*etcd_user"),
        ({"serviceAccount": {"create": False}}, "serviceAccount.name"),
        (
            {"gateway": {"autoscaling": {"enabled": True, "minReplicas": 9}}},
            "gateway.autoscaling.minReplicas",
        ),
        (
            {"podDisruptionBudget": {"maxUnavailable": 0}, "balancer": {"replicas": 2}},
            "podDisruptionBudget.maxUnavailable: 0 lets no pod of balancer be evicted",
        ),
        (
            {"podDisruptionBudget": {"maxUnavailable": "0%"}, "kvcache": {"replicas": 2}},
            "no pod of kvcache be evicted",
        ),
        (
            {"gateway": {"strategy": {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 0}}}},
            "gateway.strategy.rollingUpdate.maxUnavailable: 0",
        ),
        (
            {"engines": [ENGINE | {"strategy": {"rollingUpdate": {"maxUnavailable": 0}}}]},
            r"engines\[0\].strategy.rollingUpdate.maxUnavailable: 0",
        ),
        ({"gateway": {"strategy": {"rolling": {}}}}, "/gateway/strategy.*rolling"),
        ({"gateway": {"ingress": {"enabled": True}}}, "gateway.ingress.hosts: needed"),
        ({"gateway": {"httpRoute": {"enabled": True}}}, "gateway.httpRoute.parentRefs: needed"),
        (
            {"gateway": {"service": {"loadBalancerSourceRanges": ["10.0.0.0/8"]}}},
            "gateway.service.loadBalancerSourceRanges: only for",
        ),
        ({"gateway": {"service": {"loadBalancerSourceRanges": ["10.0.0.0"]}}}, "SourceRanges/0"),
        ({"drainGraceSeconds": -1}, "/drainGraceSeconds"),
        ({"logLevel": "loud"}, "/logLevel"),
        ({"tracing": {"otlpEndpoint": "jaeger:4317"}}, "/tracing/otlpEndpoint"),
    ],
)
def test_a_bad_value_is_refused_by_its_name(render, values, message):
    with pytest.raises(helm_python.HelmError, match=f"(?s){message}"):
        render(values)
