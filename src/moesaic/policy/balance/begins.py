"""Whether a policy is to be asked at all, and why not."""

from __future__ import annotations

from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.policy.balance import asked


def balances(job: Job, plan: Plan) -> bool:
    """Whether anything is to be balanced."""
    return job.balance.copies_are_made and asked.balances(job, plan)


def stands_aside(job: Job, plan: Plan) -> str | None:
    """Why nobody is asked though experts are shared out, for a person; None where somebody is, or
    nobody was to be. Whoever has no room for copies asks for none, and deciding on them takes
    time."""
    unlimited = job.balance.model_copy(update={"copies": None})
    anybody = asked.balances(job.model_copy(update={"balance": unlimited}), plan)
    if anybody and not job.balance.copies_are_made:
        return "for there is no room for any (balance.copies = 0)"
    return asked.stands_aside(job, plan)
