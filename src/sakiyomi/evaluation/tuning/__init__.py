"""Finds the fastest drafter and draft length on this machine: measures, predicts, tries, and keeps the result."""
