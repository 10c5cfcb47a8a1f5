"""Requests on a target and a drafter: the loop, its slots and schedules, and `LLM`, the front door."""
