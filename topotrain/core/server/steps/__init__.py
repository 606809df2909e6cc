"""Steps of worker groups on one server: from what workers push to new values."""
