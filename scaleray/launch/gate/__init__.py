"""`scaleray gate`: evidence of recorded runs, certificates and studies, and the policy that they are held against."""
