-- ARGV: [5] id, [6] epoch, [7] secret.
local id, epoch = ARGV[5], ARGV[6]

if not member_of(id) then
  return {'unknown-instance'}
end
local _, refused = living(id, epoch, ARGV[7])
if refused then
  return refused
end
remove(id, 'deregistered')
return {'ok'}
