"""`scaleray gate`: evaluate the evidence of recorded runs, certificates and studies by a policy."""
