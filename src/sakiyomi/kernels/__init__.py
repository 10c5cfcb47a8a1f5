"""Everything that runs inside a pass: plans, attention operators, packed weights, compiled graphs."""
