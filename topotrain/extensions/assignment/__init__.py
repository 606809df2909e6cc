"""Parameters that the script itself changes (`tt.assign`)."""
