"""Which drafter is fastest here, and how far it should read ahead: measured, predicted, tried, kept."""
