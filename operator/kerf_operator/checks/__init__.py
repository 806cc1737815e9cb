"""What is wrong, and what to do about it: small pure checks over observed objects.

Each check looks at one thing and returns a ``Finding`` or None.  The same checks serve both kinds.
"""

from kerf_operator.checks.finding import Finding, Severity, shorten, worst
from kerf_operator.checks.jobs import check_job, finished_job, job_result
from kerf_operator.checks.objects import check_deployment, check_failures, check_names
from kerf_operator.checks.pods import check_pod, check_pods, is_ready_pod
from kerf_operator.checks.storage import check_claim

__all__ = [
    "Finding",
    "Severity",
    "check_claim",
    "check_deployment",
    "check_failures",
    "check_job",
    "check_names",
    "check_pod",
    "check_pods",
    "finished_job",
    "is_ready_pod",
    "job_result",
    "shorten",
    "worst",
]
