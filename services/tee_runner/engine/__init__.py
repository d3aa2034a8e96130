"""Requests in, tokens out: runtime, scheduler, sampling."""
