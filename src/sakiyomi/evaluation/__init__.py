"""What is measured and judged: benchmarks, audits, tuning, predictions. It runs engines, and no engine needs it."""
