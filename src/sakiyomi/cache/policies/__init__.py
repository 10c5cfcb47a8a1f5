"""Eviction policies by the names that ``cache=`` takes, and what can be combined with them.

A new policy is a file, its class in ``specs.POLICY_CLASSES``, and its options in ``CACHE_FORMS``
(``core/cache_specs.py``).
"""

from sakiyomi.cache.policies.base import Policy, View
from sakiyomi.cache.policies.specs import POLICIES, CacheSpec, read_cache

__all__ = ["POLICIES", "CacheSpec", "Policy", "View", "read_cache"]
