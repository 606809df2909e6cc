"""Automatic placement (`placement: kAuto`): nothing imports it but `api.automatic_placement`."""
